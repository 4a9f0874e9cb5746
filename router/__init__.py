"""Which replica serves a request, and where its prompt is prefilled (pure except ``ray_router``)."""
