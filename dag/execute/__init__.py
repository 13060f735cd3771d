"""Running one stage: its `fx.GraphModule`, stand-ins for kernels that trust their caller, the
weight half of its backward, what makes up for
microbatches that leave it out, and a lost stage made anew from its neighbours."""
