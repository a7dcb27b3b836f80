"""The record of a profile in results: its text, and what the text means for one run."""

from __future__ import annotations

from collections.abc import Mapping

from harness.profiles.model import Platform, Profile
from harness.results import ProfileText, WaiverEntry


def as_recorded(profile: Profile, texts: Mapping[str, str], platform: Platform, subject: str) -> ProfileText:
    """Return the record of a profile.

    ``texts``: the texts of its file, of the files that it inherits from, and of the defects that may count for it, by
    their names in messages.  A run writes the record, and a check of the run makes it again from the texts alone.
    """
    return ProfileText(
        name=profile.name,
        file=profile.file,
        texts={file: texts[file] for file in profile.files if file in texts},
        backend=profile.backend,
        device=profile.device,
        about=profile.about,
        never_run=profile.never_run,
        claims={
            "world sizes": ", ".join(map(str, profile.world_sizes)) or "any",
            "ranks on a device": str(profile.ranks_per_device),
        },
        waivers=[
            WaiverEntry(
                place=waiver.place,
                tests=list(waiver.tests),
                reason=waiver.reason,
                link=waiver.link,
                expires=waiver.expires.isoformat(),
                verdicts=list(waiver.verdicts),
                intermittent=waiver.intermittent,
                applies=waiver.when.holds(platform) and subject in waiver.subjects,
                owner=waiver.owner,
                defect=waiver.defect,
            )
            for waiver in profile.waivers
        ],
    )
