"""Generated training runs: as data (``spec``), drawn (``strategies``), as Python (``source``), executed (``execute``)."""
