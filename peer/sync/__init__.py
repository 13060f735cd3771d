"""What holders exchange at the end of a step, and the update that follows, on tensors alone.
`strategy` says what a holder makes of its gradients before and after the exchange: as it stands the
plain mean; `ahead` lets holders step ahead, `dgc` keeps momentum before a codec. `feedback` is for
those that encode gradients themselves: `low_rank`, `demo`, and with `pairs` of values and places
`gtopk` and `lags`. `vector` has gradients as a flat vector, `statistics` batch-norm statistics,
`norm` the global norm and the results of a step; `optimizer` updates a stage's parameters.
Everything travels as plain flat tensors whose specs both ends know beforehand."""
