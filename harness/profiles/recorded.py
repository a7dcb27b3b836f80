"""A profile as results keep it: the text, and what follows from the text for one run."""

from __future__ import annotations

from collections.abc import Mapping

from harness.profiles.model import Platform, Profile
from harness.results import ProfileText, WaiverEntry


def as_recorded(profile: Profile, texts: Mapping[str, str], platform: Platform, subject: str) -> ProfileText:
    """The record of a profile; ``texts``: by what messages call a file, its text, of those that it stands on as well.

    A run writes it, and whoever checks the run makes it again from the texts alone.
    """
    return ProfileText(
        name=profile.name,
        file=profile.file,
        texts={file: texts[file] for file in (profile.file, *profile.bases) if file in texts},
        backend=profile.backend,
        device=profile.device,
        about=profile.about,
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
            )
            for waiver in profile.waivers
        ],
    )
