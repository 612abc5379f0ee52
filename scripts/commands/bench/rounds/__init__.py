"""Plans a run of `hearth bench`, plays its rounds and keeps what they measured."""
