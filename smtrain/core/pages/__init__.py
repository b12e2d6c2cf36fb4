"""HTML pages and their charts: jinja2 templates that escape every value, and SVG."""
