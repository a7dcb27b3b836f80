"""Generated training runs: as data (``spec``), drawn (``strategies``), written as Python (``source``), judged (``check``)."""
