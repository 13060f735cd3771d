"""What the broker has decided and must not forget, and the barrier that nothing passes before it is
on disk."""
