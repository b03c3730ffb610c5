"""The one place that lists, surveys and fingerprints a data folder."""
