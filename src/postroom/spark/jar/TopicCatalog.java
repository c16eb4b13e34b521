package postroom.spark;

import java.util.Arrays;
import java.util.Map;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Topics as tables: spark.sql.catalog.mq=postroom.spark.TopicCatalog, spark.sql.catalog.mq.url=….
 *
 * Which topics there are is asked of Python each time. Topics are not made, changed or dropped by SQL: DROP
 * TABLE would delete messages that others read.
 */
public final class TopicCatalog implements TableCatalog {
  private static final String[] ROOT = {};

  private String name;
  private TableOptions options;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap settings) {
    this.name = name;
    this.options = TableOptions.ofCatalog(settings.asCaseSensitiveMap());
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length > 0) {
      throw new NoSuchNamespaceException(namespace);
    }
    return Arrays.stream(options.schema("topics").fieldNames())
        .map(topic -> Identifier.of(ROOT, topic))
        .toArray(Identifier[]::new);
  }

  @Override
  public boolean tableExists(Identifier table) {
    return table.namespace().length == 0
        && Arrays.asList(options.schema("topics").fieldNames()).contains(table.name());
  }

  /**
   * A topic that is not there is Python's error, which says which one was probably meant: of a
   * NoSuchTableException Spark would make a sentence of its own. Only a question is answered with it.
   */
  @Override
  public Table loadTable(Identifier table) throws NoSuchTableException {
    if (isQuestion() && !tableExists(table)) {
      throw new NoSuchTableException(table);
    }
    String topic = topic(table);
    TableOptions ofTopic = options.ofTopic(topic);
    return new TopicTable(name + "." + topic, ofTopic.schema("topic"), ofTopic);
  }

  @Override
  public Table createTable(
      Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    throw refused("create " + topic(table), "There is no such topic, and SQL does not make one");
  }

  @Override
  public Table alterTable(Identifier table, TableChange... changes) {
    throw refused("alter " + topic(table), "A topic is not altered by SQL");
  }

  @Override
  public boolean dropTable(Identifier table) {
    throw refused("delete " + topic(table), "A topic is not dropped by SQL, with the messages in it");
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("A topic keeps its name: create another, and copy the messages");
  }

  /** Asked by spark.catalog.tableExists, which loads a table to see whether it is there. */
  private static boolean isQuestion() {
    return StackWalker.getInstance()
        .walk(calls -> calls.anyMatch(call -> call.getMethodName().equals("tableExists")));
  }

  private String topic(Identifier table) {
    if (table.namespace().length > 0) {
      String topic = String.join(".", table.namespace()) + "." + table.name();
      throw new IllegalArgumentException(
          "Catalog " + name + " has topics, and no schemas; a name with dots is quoted: "
              + name + ".`" + topic + "`");
    }
    return table.name();
  }

  private static UnsupportedOperationException refused(String command, String why) {
    return new UnsupportedOperationException(why + ": use postroom topic " + command);
  }
}
