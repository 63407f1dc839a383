"""Sets of tolerances for the smoke lab, as a person may want them instead of the lab's own. What a set leaves out stays the lab's."""

PRESETS = {
    "strict": {
        "drift_mib": 2.0,  # an interpreter that does the same again moves by some hundred KiB
    },
    "common practice": {
        "fds_more": 8.0,  # nobody looks at files and threads before a limit of the system is hit;
        "threads_more": 8.0,  # a few that stay from the first use of a backend pass for normal
        "drift_mib": 200.0,  # what stays below the noise of a resident-set plot
    },
}
