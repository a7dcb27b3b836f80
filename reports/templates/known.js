const VERDICTS = {{ verdicts | tojson }};
const CASE_VERDICTS = {{ case_verdicts | tojson }};
const FIELD_ORDER = {{ field_order | tojson }};
const REPORT_VERSION = {{ report_version }};
