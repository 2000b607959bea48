"""Fine-tuning on your own images (Table 4, App. B.1.1).

`protocol` reads the data and makes a plan (`budget` measures, `plan` chooses, `stages` is the table). `run_job` does
the work on the decided `job`: `representations`, `head`, `sweep`, final runs and tests. It asks the job's clock whether
the time suffices, and chooses on the images of `held_out` by `scores`. `result` is what comes back. The report of a
finished job is `inspection/write_pages.report`.
"""
