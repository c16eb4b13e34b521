package postroom.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The options of a table, as `option.NAME`; those of a query have no prefix. Which of them counts for what
 * is decided in Python (`postroom/spark/tables.py`). Must never be shown: there may be a token among them.
 */
final class TableOptions {
  private static final String PREFIX = TableCatalog.OPTION_PREFIX;
  private static final String ASKED = "jar";

  private final Map<String, String> options = new HashMap<>();

  /** Whether these properties are of a table, and not options of a DataFrame. */
  static boolean areIn(Map<String, String> properties) {
    return properties.keySet().stream().anyMatch(name -> name.startsWith(PREFIX));
  }

  /** Those of a table that CREATE TABLE has made: Spark puts properties of its own beside them. */
  static TableOptions of(Map<String, String> properties) {
    TableOptions found = new TableOptions();
    properties.forEach(
        (name, value) -> {
          if (name.startsWith(PREFIX)) {
            found.options.put(name, value);
          }
        });
    return found;
  }

  /** Those of a catalog. */
  static TableOptions ofCatalog(Map<String, String> settings) {
    TableOptions found = new TableOptions();
    settings.forEach((name, value) -> found.options.put(PREFIX + name, value));
    return found;
  }

  TableOptions ofTopic(String topic) {
    TableOptions found = of(options);
    found.options.put(PREFIX + "topic", topic);
    return found;
  }

  /** What Python is given for a query: the table's options, and beside them the query's. */
  CaseInsensitiveStringMap with(CaseInsensitiveStringMap ofQuery) {
    Map<String, String> all = new HashMap<>(ofQuery.asCaseSensitiveMap());
    all.putAll(options);
    all.put(ASKED, "table");
    return new CaseInsensitiveStringMap(all);
  }

  /** Python's answer to a question; it answers with a schema, the one thing that Spark asks it for. */
  StructType schema(String question) {
    Map<String, String> all = new HashMap<>(options);
    all.put(ASKED, question);
    return source().inferSchema(new CaseInsensitiveStringMap(all));
  }

  static PythonDataSourceV2 source() {
    PythonDataSourceV2 source = new PythonDataSourceV2();
    source.setShortName(PostroomSource.NAME);
    return source;
  }
}
