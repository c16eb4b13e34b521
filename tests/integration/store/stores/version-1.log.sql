BEGIN TRANSACTION;
CREATE TABLE postroom_duties (
        name VARCHAR(60) PRIMARY KEY,
        holder VARCHAR(120) NOT NULL,
        until_ms BIGINT NOT NULL);
INSERT INTO "postroom_duties" VALUES('retention','somebody',1700000001000);
CREATE TABLE postroom_groups (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        topic_id BIGINT NOT NULL,
        name VARCHAR(60) NOT NULL,
        settings TEXT NOT NULL,
        generation INTEGER NOT NULL,
        paused INTEGER NOT NULL,
        created_at BIGINT NOT NULL,
        UNIQUE (topic_id, name));
INSERT INTO "postroom_groups" VALUES(1,1,'billing','{"mode":"shared","order":"key","start":{"kind":"earliest","time_ms":0,"offsets":[]},"lease_ms":1000,"max_attempts":3,"exhausted":"dead"}',1,0,1700000000000);
INSERT INTO "postroom_groups" VALUES(2,1,'late','{"mode":"shared","order":"key","start":{"kind":"latest","time_ms":0,"offsets":[]},"lease_ms":30000,"max_attempts":16,"exhausted":"dead"}',1,0,1700000000000);
CREATE TABLE postroom_log_1 (
                    base_offset INTEGER PRIMARY KEY,
                    records INTEGER NOT NULL,
                    bytes INTEGER NOT NULL,
                    bytes_before BIGINT NOT NULL,
                    appended_at BIGINT NOT NULL,
                    first_ts BIGINT NOT NULL,
                    last_ts BIGINT NOT NULL,
                    ids BLOB,
                    batch BLOB NOT NULL);
INSERT INTO "postroom_log_1" VALUES(0,5,146,0,1700000000000,1000,1004,NULL,X'000000000000000000000086FFFFFFFF025461A13000000000000400000000000003E800000000000003EC00000000000000070000000000000000000520000000066B65790E76616C75652D300020000202066B65790E76616C75652D310020000404066B65790E76616C75652D320020000606066B65790E76616C75652D330020000808066B65790E76616C75652D3400');
INSERT INTO "postroom_log_1" VALUES(5,3,112,146,1700000000000,1000,1002,NULL,X'000000000000000500000064FFFFFFFF02474913AA00000000000200000000000003E800000000000003EA00000000000000070000000000050000000320000000066B65790E76616C75652D300020000202066B65790E76616C75652D310020000404066B65790E76616C75652D3200');
CREATE TABLE postroom_log_2 (
                    base_offset INTEGER PRIMARY KEY,
                    records INTEGER NOT NULL,
                    bytes INTEGER NOT NULL,
                    bytes_before BIGINT NOT NULL,
                    appended_at BIGINT NOT NULL,
                    first_ts BIGINT NOT NULL,
                    last_ts BIGINT NOT NULL,
                    ids BLOB,
                    batch BLOB NOT NULL);
INSERT INTO "postroom_log_2" VALUES(0,4,129,0,1700000000000,1000,1003,NULL,X'000000000000000000000075FFFFFFFF02AA0CD61400000000000300000000000003E800000000000003EBFFFFFFFFFFFFFFFFFFFFFFFFFFFF0000000420000000066B65790E76616C75652D300020000202066B65790E76616C75652D310020000404066B65790E76616C75652D320020000606066B65790E76616C75652D3300');
INSERT INTO "postroom_log_2" VALUES(4,1,78,129,1700000000000,1000,1000,NULL,X'000000000000000400000042FFFFFFFF0204D79F9100000000000000000000000003E800000000000003E8FFFFFFFFFFFFFFFFFFFFFFFFFFFF0000000120000000066B65790E76616C75652D3000');
CREATE TABLE postroom_partitions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        topic_id BIGINT NOT NULL,
        number INTEGER NOT NULL,
        state VARCHAR(10) NOT NULL,
        next_offset BIGINT NOT NULL,
        next_bytes BIGINT NOT NULL,
        appended_at BIGINT NOT NULL);
INSERT INTO "postroom_partitions" VALUES(1,1,0,'open',8,258,1700000000000);
INSERT INTO "postroom_partitions" VALUES(2,1,1,'open',5,207,1700000000000);
CREATE TABLE postroom_ranges (
        topic_id BIGINT NOT NULL,
        version INTEGER NOT NULL,
        first_slot INTEGER NOT NULL,
        last_slot INTEGER NOT NULL,
        partition_id BIGINT NOT NULL,
        PRIMARY KEY (topic_id, version, first_slot));
INSERT INTO "postroom_ranges" VALUES(1,1,0,511,1);
INSERT INTO "postroom_ranges" VALUES(1,1,512,1023,2);
CREATE TABLE postroom_schema (version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL);
INSERT INTO "postroom_schema" VALUES(1,1700000000000);
CREATE TABLE postroom_sequences (
        producer_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        state BLOB NOT NULL,
        seen_at BIGINT NOT NULL,
        PRIMARY KEY (producer_id, partition_id));
INSERT INTO "postroom_sequences" VALUES(7,1,X'0100000000000000000004000000000000000000000005000000070000000000000005',1700000000000);
CREATE TABLE postroom_settings (name VARCHAR(60) PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "postroom_settings" VALUES('uuid','d578bd24-29d4-4461-bfe9-376e55f80ebf');
INSERT INTO "postroom_settings" VALUES('catalog_version','3');
CREATE TABLE postroom_starts (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        start_offset BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id));
INSERT INTO "postroom_starts" VALUES(1,1,0);
INSERT INTO "postroom_starts" VALUES(1,2,0);
INSERT INTO "postroom_starts" VALUES(2,1,8);
INSERT INTO "postroom_starts" VALUES(2,2,4);
CREATE TABLE postroom_topics (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name VARCHAR(250) NOT NULL UNIQUE,
        settings TEXT NOT NULL,
        route_version INTEGER NOT NULL,
        created_at BIGINT NOT NULL);
INSERT INTO "postroom_topics" VALUES(1,'orders','{"storage":"durable","retention_ms":0,"retention_bytes":0,"keep":"needed","drop_settled":true}',1,1700000000000);
CREATE TABLE postroom_trims (partition_id BIGINT PRIMARY KEY, log_start BIGINT NOT NULL);
INSERT INTO "postroom_trims" VALUES(2,2);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('postroom_partitions',2);
INSERT INTO "sqlite_sequence" VALUES('postroom_topics',1);
INSERT INTO "sqlite_sequence" VALUES('postroom_groups',2);
COMMIT;
