package postroom.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The data source `postroom` as Spark has it, with one difference: a table of CREATE TABLE … USING postroom
 * keeps its OPTIONS. Spark's own forgets them when the table is used. Everything else stays Spark's.
 */
public final class PostroomSource extends PythonDataSourceV2 implements DataSourceRegister {
  static final String NAME = "postroom";

  @Override
  public String shortName() {
    return NAME;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    Map<String, String> given = options.asCaseSensitiveMap();
    if (!TableOptions.areIn(given)) {
      return super.inferSchema(options);
    }
    return TableOptions.of(given).schema("table");
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    if (!TableOptions.areIn(properties)) {
      return super.getTable(schema, partitioning, properties);
    }
    return new TopicTable(NAME, schema, TableOptions.of(properties));
  }
}
