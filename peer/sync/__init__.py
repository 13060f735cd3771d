"""What holders exchange at the end of a step, as pure functions on tensors.

`vector` has the gradients of a stage or a tied parameter and adds them up, `ahead` the updates of
holders that step ahead, `statistics` batch-norm statistics, `norm` the global norm and the results
of a step.
Everything travels as plain flat tensors whose specs both ends know beforehand.
"""
