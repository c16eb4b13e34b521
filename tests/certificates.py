"""Certificates for tests: an authority, and what it signs. Made once in a run; keys are small and fast."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Pair"]


@dataclass(frozen=True)
class Pair:
    """Paths of PEM files."""

    cert: str
    key: str


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.ca = self._write(name, self._sign(name, self._key.public_key(), ca=True), self._key).cert

    def issue(self, name: str, *, password: bytes | None = None) -> Pair:
        """For a server on this machine, or a client of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._write(name, self._sign(name, key.public_key(), ca=False), key, password)

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        issued = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if ca:
            issued = issued.add_extension(_SIGNS, critical=True)
        return issued.sign(self._key, hashes.SHA256())

    def _write(
        self,
        name: str,
        cert: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        password: bytes | None = None,
    ) -> Pair:
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            hidden = serialization.BestAvailableEncryption(password)
        pem = serialization.Encoding.PEM
        cert_file.write_bytes(cert.public_bytes(pem))
        key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, hidden))
        return Pair(str(cert_file), str(key_file))


_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
