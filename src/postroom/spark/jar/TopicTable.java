package postroom.spark;

import static org.apache.spark.sql.connector.catalog.TableCapability.ACCEPT_ANY_SCHEMA;
import static org.apache.spark.sql.connector.catalog.TableCapability.BATCH_READ;
import static org.apache.spark.sql.connector.catalog.TableCapability.BATCH_WRITE;
import static org.apache.spark.sql.connector.catalog.TableCapability.MICRO_BATCH_READ;
import static org.apache.spark.sql.connector.catalog.TableCapability.STREAMING_WRITE;
import static org.apache.spark.sql.connector.catalog.TableCapability.TRUNCATE;

import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Topics as a table: reads and writes are those of the Python data source, with the table's options.
 *
 * Every scan has a source of its own: Spark keeps the plan of the first one in it, and a table would show for
 * ever what was there then. Rows are written by the names of their columns, strings or binary (ACCEPT_ANY_SCHEMA:
 * Python checks them). TRUNCATE is INSERT OVERWRITE: Python refuses it, and says what to do.
 */
final class TopicTable implements SupportsRead, SupportsWrite {
  private final String name;
  private final StructType schema;
  private final TableOptions options;

  TopicTable(String name, StructType schema, TableOptions options) {
    this.name = name;
    this.schema = schema;
    this.options = options;
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public StructType schema() {
    return schema;
  }

  @Override
  public Map<String, String> properties() {
    return Map.of(TableCatalog.PROP_PROVIDER, PostroomSource.NAME);
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        BATCH_READ, BATCH_WRITE, MICRO_BATCH_READ, STREAMING_WRITE, TRUNCATE, ACCEPT_ANY_SCHEMA);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap ofQuery) {
    return ((SupportsRead) inPython()).newScanBuilder(options.with(ofQuery));
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return ((SupportsWrite) inPython()).newWriteBuilder(new Info(info, options.with(info.options())));
  }

  private Table inPython() {
    return TableOptions.source().getTable(schema, new Transform[0], Map.of());
  }

  /** The same, with other options. */
  private record Info(LogicalWriteInfo of, CaseInsensitiveStringMap options) implements LogicalWriteInfo {
    @Override
    public String queryId() {
      return of.queryId();
    }

    @Override
    public StructType schema() {
      return of.schema();
    }
  }
}
