"""The planner: does it fit, how fast, how long, how much, and what would be better. `smtrain.plan` is its front door."""
