"""From a config to jobs: launch and run, one job after another, warm pools, and the SDKs' own objects."""
