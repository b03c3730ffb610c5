"""Examples. A package, because opacus installs one of the same name, which would be imported instead."""
