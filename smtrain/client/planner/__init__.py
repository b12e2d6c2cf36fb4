"""The planner: does it fit, how fast, how long, how much, and what is better. Its front door is `smtrain.plan`."""
