"""`python -m postroom.spark.jar` says where the jar is, for `spark-submit --jars`.

With `build` it is made again (`make jar`), which needs a JDK and PySpark.
"""

import sys

from . import JAR, build

if sys.argv[1:] == ["build"]:
    build()
print(JAR)
