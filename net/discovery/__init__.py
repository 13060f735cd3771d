"""Where a broker is, when its address is not fixed: found by the name of its swarm.

record      what a broker says of its whereabouts, signed by its authority; which of several to
            believe; what a directory of such records does. No I/O, no clock
process     a directory over hivemind's DHT, in a process of its own that ends with ours
node        that process; the only place that imports hivemind
tied        starts a program that ends with its parent
"""
