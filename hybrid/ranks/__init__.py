"""The ranks of a job: their grid, their launcher, their failures and requests to stop."""
