"""Money moves between two banks, and the books balance whatever dies in between.

    python -m examples.bank_transfer.bank prepare
    postroom worker examples.bank_transfer.bank:app
    python -m examples.bank_transfer.bank transfer t-1 alice bob 2500

The bank that pays takes the money and writes the message in one transaction (outbox). The bank that is paid
books each transfer once, however often its message comes (guard). There is no transaction over both, and no
moment at which money is lost or doubled: it is with alice, on its way, or with bob.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, Engine, create_engine, text

import postroom
from postroom import guards

PAYS = create_engine(os.environ.get("BANK_DB", "sqlite:///bank.db"))
IS_PAID = create_engine(os.environ.get("OTHER_BANK_DB", "sqlite:///other_bank.db"))

QUEUE = os.environ.get("POSTROOM_URL", "sqlite:///queue.db")

app = postroom.App(QUEUE)
outbox = postroom.Outbox()
app.outbox(outbox, PAYS, lease=os.environ.get("LEASE", "10s"))  # workers send what was paid, and book it

_NAME = "VARCHAR(50) NOT NULL PRIMARY KEY"


@dataclass
class Transfer:
    number: str
    sender: str
    receiver: str
    cents: int


class Refused(Exception):
    """The sender does not have that much."""


def pay(transfer: Transfer) -> bool:
    """Take the money and write the message: both, or neither. False: this transfer was made before.

    Whoever does not know whether it worked calls again, with the same number.
    """
    with PAYS.connect() as bank, outbox.transaction(bank):
        if not _first_time(bank, transfer):
            return False
        taken = bank.execute(
            text("UPDATE accounts SET cents = cents - :cents WHERE owner = :sender AND cents >= :cents"),
            {"cents": transfer.cents, "sender": transfer.sender},
        )
        if not taken.rowcount:
            raise Refused(f"{transfer.sender} has less than {transfer.cents} cents")
        body = msgspec.json.encode(transfer)
        outbox.send(bank, "transfers", body, key=transfer.receiver, id=transfer.number)
    return True


def _first_time(bank: Connection, transfer: Transfer) -> bool:
    known = {"number": transfer.number, "cents": transfer.cents}
    if bank.execute(text("SELECT 1 FROM transfers WHERE number = :number"), known).first() is not None:
        return False
    bank.execute(text("INSERT INTO transfers (number, cents) VALUES (:number, :cents)"), known)
    return True


@app.subscribe("transfers", group="other-bank", lease=os.environ.get("LEASE", "30s"))
@guards.once(IS_PAID.connect)
def book(transfer: Transfer, connection: Connection) -> None:
    """In the transaction in which the guard writes down that it has seen this transfer."""
    booked = connection.execute(
        text("UPDATE accounts SET cents = cents + :cents WHERE owner = :receiver"),
        {"cents": transfer.cents, "receiver": transfer.receiver},
    )
    if not booked.rowcount:
        raise postroom.Dead(f"there is no account of {transfer.receiver}")  # `postroom dead list` shows it


def prepare() -> None:
    """Once: the topic, accounts, and the tables of outbox and guards."""
    with postroom.sync.connect(QUEUE) as mq:
        mq.create_topic("transfers", partitions=4, exist_ok=True)
    for engine in (PAYS, IS_PAID):
        with engine.begin() as bank:
            bank.execute(text(f"CREATE TABLE IF NOT EXISTS accounts (owner {_NAME}, cents BIGINT NOT NULL)"))
            bank.execute(
                text(f"CREATE TABLE IF NOT EXISTS transfers (number {_NAME}, cents BIGINT NOT NULL)")
            )
    with PAYS.begin() as bank:
        outbox.create_table(bank)
    with IS_PAID.begin() as bank:
        guards.create_tables(bank)


def open_account(engine: Engine, owner: str, cents: int) -> None:
    with engine.begin() as bank:
        values = {"owner": owner, "cents": cents}
        bank.execute(text("INSERT INTO accounts (owner, cents) VALUES (:owner, :cents)"), values)


def balance(engine: Engine, owner: str) -> int:
    with engine.connect() as bank:
        asked = bank.execute(text("SELECT cents FROM accounts WHERE owner = :owner"), {"owner": owner})
        return int(asked.scalar_one())


def main(command: str, *args: str) -> None:
    if command == "prepare":
        prepare()
        open_account(PAYS, "alice", 10_000)
        open_account(IS_PAID, "bob", 0)
    else:
        number, sender, receiver, cents = args
        print("paid" if pay(Transfer(number, sender, receiver, int(cents))) else "was paid before")


if __name__ == "__main__":
    main(*sys.argv[1:])
