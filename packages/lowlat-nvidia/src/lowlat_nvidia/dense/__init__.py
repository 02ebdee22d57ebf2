"""One decode or verify step of a dense transformer in one persistent launch: `plan`, `pack`, `step`, `reference`."""
