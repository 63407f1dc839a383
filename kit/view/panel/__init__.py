"""A lab's panel: an observable model, a controller that drives the lab, and widgets that only observe."""
