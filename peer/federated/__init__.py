"""Local work of federated clients on one peer: which samples a batch of theirs has (`batches`), and
many of them trained side by side (`cohort`)."""
