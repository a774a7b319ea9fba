"""The status page: `readings` of families and of the last hour, `view` of them, `document` made of `elements`."""
