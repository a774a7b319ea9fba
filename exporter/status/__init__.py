"""Status page: families and history (`readings`), content (`view`, `concerns`), sections, HTML (`templates`)."""
