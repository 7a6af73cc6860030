# Filled by the packaging step: install rules and the package config.
