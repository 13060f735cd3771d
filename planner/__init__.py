"""Plans from a request: the graph, the peers on offer and what a job allows become a plan with its
reasons. Knows no broker and no peer; `service/` has the processes that planning runs in."""
