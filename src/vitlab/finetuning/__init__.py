"""Fine-tuning on your own images (Table 4, App. B.1.1).

`protocol` reads the data and makes a plan (`budget` measures, `plan` chooses, `stages` is the table); `job` does the
work (`head`, then the runs, then the tests), asks `job_clock` whether the time suffices, and chooses by `scores`;
`result` is what comes back. The report of a finished job is `inspection/write_pages.report`.
"""
