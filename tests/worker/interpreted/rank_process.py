"""A plugin of pytest that imports torch and transformers as a rank's process does, in half the time."""

from millrace.worker import import_modules

import_modules()
