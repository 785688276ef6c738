"""Several ranks with one model: tensor parallel and pipeline parallel."""
