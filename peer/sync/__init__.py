"""What holders exchange at the end of a step, and the update that follows, on tensors alone.
`allreduce` adds the gradients of a stage's holders and those of tied parameters, `statistics`
carries batch-norm statistics, `norm` the global norm and the results of a step, `ahead` lets
holders step ahead, `optimizer` updates a stage's parameters. Everything travels as plain flat
tensors whose specs both ends know beforehand."""

__all__ = [
    "ahead",
    "narrow",
    "norm",
    "optimizer",
    "statistics",
    "vector",
]
