"""From a config to a job and back: what is sent, how it is followed, and what a whole run is made of."""
