"""Rules by which parameters are updated, where a job names one: `kinds` makes torch's own, `lion`
is the one that torch has not, `blockwise` keeps moments in 8 bits."""
