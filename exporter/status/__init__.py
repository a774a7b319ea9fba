"""Status page: families (`samples`), `history`, content (`view`), `conditions`, sections, HTML (`templates`)."""
