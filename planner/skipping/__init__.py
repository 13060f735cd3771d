"""Plans whose microbatches leave stages out or visit neighbours the other way round (SkipPipe):
layouts of stages, routes over them, and which of them a job gets."""
