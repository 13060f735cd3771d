"""The plan as data: who holds which stage, what each action is, and which values cross from stage
to stage; and beside it its report, for people."""
