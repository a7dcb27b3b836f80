"""Generated training runs: drawn (`strategies`), data (`spec`), Python (`source`), judged (`check`)."""
