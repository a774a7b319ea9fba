"""Status page: families (`readings`), `history`, content (`view`), `conditions`, sections, HTML (`templates`)."""
