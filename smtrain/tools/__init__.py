"""Tools over runs and models: chat, compare, report, serve, tune, images, publish."""
