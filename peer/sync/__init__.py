"""What holders exchange at the end of a step, as pure functions on tensors.

`allreduce` adds the gradients of a stage's holders, `tied` those of a tied parameter's stages,
`statistics` carries batch-norm statistics, `norm` the global norm and the results of a step.
Everything travels as plain flat tensors whose specs both ends know beforehand.
"""
