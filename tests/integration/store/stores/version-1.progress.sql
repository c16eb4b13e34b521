BEGIN TRANSACTION;
CREATE TABLE postroom_deliveries (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        first_offset BIGINT NOT NULL,
        last_offset BIGINT NOT NULL,
        visible_at BIGINT NOT NULL,
        token BIGINT NOT NULL,
        holder VARCHAR(120) NOT NULL,
        spent INTEGER NOT NULL,
        failures INTEGER NOT NULL,
        suspect INTEGER NOT NULL,
        alone INTEGER NOT NULL,
        stamp_producer BIGINT,
        stamp_partition BIGINT,
        reason TEXT NOT NULL,
        PRIMARY KEY (group_id, partition_id, first_offset));
INSERT INTO "postroom_deliveries" VALUES(1,1,2,2,1700000005000,0,'',1,1,0,0,NULL,NULL,'busy');
INSERT INTO "postroom_deliveries" VALUES(1,1,5,5,1700000001000,1,'ann',0,0,0,0,NULL,NULL,'');
CREATE TABLE postroom_members (
        group_id BIGINT NOT NULL,
        name VARCHAR(120) NOT NULL,
        client VARCHAR(250) NOT NULL,
        joined_at BIGINT NOT NULL,
        until_ms BIGINT NOT NULL,
        PRIMARY KEY (group_id, name));
INSERT INTO "postroom_members" VALUES(1,'ann','host',1700000000000,1701000000000);
CREATE TABLE postroom_owner (uuid VARCHAR(36) PRIMARY KEY);
INSERT INTO "postroom_owner" VALUES('d578bd24-29d4-4461-bfe9-376e55f80ebf');
CREATE TABLE postroom_progress (
        group_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        generation INTEGER NOT NULL,
        next_new BIGINT NOT NULL,
        next_due BIGINT,
        settled BIGINT NOT NULL,
        first_wait_ms BIGINT NOT NULL,
        sampled_at BIGINT NOT NULL,
        sampled BIGINT NOT NULL,
        earlier_at BIGINT NOT NULL,
        earlier BIGINT NOT NULL,
        PRIMARY KEY (group_id, partition_id));
INSERT INTO "postroom_progress" VALUES(1,1,1,6,1700000001000,4,0,1700000000000,0,1700000000000,0);
INSERT INTO "postroom_progress" VALUES(1,2,1,5,NULL,5,0,1700000000000,0,1700000000000,0);
CREATE TABLE postroom_schema (version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL);
INSERT INTO "postroom_schema" VALUES(1,1700000000000);
CREATE INDEX postroom_deliveries_due ON postroom_deliveries (group_id, partition_id, visible_at);
CREATE INDEX postroom_deliveries_token ON postroom_deliveries (token);
COMMIT;
