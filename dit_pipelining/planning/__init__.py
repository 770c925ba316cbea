"""Models known by name or from their configs alone, and the inputs their pipelines pass: enough to plan without weights."""
