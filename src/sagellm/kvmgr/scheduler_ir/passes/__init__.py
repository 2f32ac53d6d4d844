"""Scheduler passes, one file each, named as the file. README.md of `scheduler_ir` lists them."""
