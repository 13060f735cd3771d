"""What a round between replicas is: policies, pure functions of what is known of it. This room is
below the machines of the broker, so that a policy decides and changes nothing."""
