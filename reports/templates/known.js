const VERDICTS = {{ verdicts | tojson }};
const CASE_VERDICTS = {{ case_verdicts | tojson }};
const REPORT_VERSION = {{ report_version }};
