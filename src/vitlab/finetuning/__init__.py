"""Fine-tuning on own images: Table 4's protocol (App. B.1.1), the least-squares head, the plan for a time budget."""
