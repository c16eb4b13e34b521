BEGIN TRANSACTION;
CREATE TABLE penstock_deliveries (
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
INSERT INTO "penstock_deliveries" VALUES(1,1,2,2,1700000005000,0,'',1,1,0,0,NULL,NULL,'busy');
INSERT INTO "penstock_deliveries" VALUES(1,1,5,5,1700000001000,1,'ann',0,0,0,0,NULL,NULL,'');
CREATE TABLE penstock_members (
        group_id BIGINT NOT NULL,
        name VARCHAR(120) NOT NULL,
        client VARCHAR(250) NOT NULL,
        joined_at BIGINT NOT NULL,
        until_ms BIGINT NOT NULL,
        PRIMARY KEY (group_id, name));
INSERT INTO "penstock_members" VALUES(1,'ann','host',1700000000000,1701000000000);
CREATE TABLE penstock_owner (uuid VARCHAR(36) PRIMARY KEY);
INSERT INTO "penstock_owner" VALUES('d578bd24-29d4-4461-bfe9-376e55f80ebf');
CREATE TABLE penstock_progress (
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
INSERT INTO "penstock_progress" VALUES(1,1,1,6,1700000001000,4,0,1700000000000,0,1700000000000,0);
INSERT INTO "penstock_progress" VALUES(1,2,1,5,NULL,5,0,1700000000000,0,1700000000000,0);
CREATE TABLE penstock_schema (version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL);
INSERT INTO "penstock_schema" VALUES(1,1700000000000);
CREATE INDEX penstock_deliveries_due ON penstock_deliveries (group_id, partition_id, visible_at);
CREATE INDEX penstock_deliveries_token ON penstock_deliveries (token);
COMMIT;
