"Recorded runs with known causes, and what `diagnose` and the trial's plan make of them."
